"""`python -m jaxlm.evaluate SOURCE`: loss, perplexity and bits per byte of a checkpoint on a data set."""

import argparse
import json
import sys

from jaxlm import commandline, restored
from partitioning.declaration import DeclarationError


def main(flags: argparse.Namespace) -> None:
    path, step, config = restored.open_config(flags)
    import jax

    from jaxlm.data import open_data
    from jaxlm.evaluation import make_evaluate
    from jaxlm.job import build_job
    data = open_data(config.data, config.model.vocab_size, train=False)
    if data.eval is None:
        raise DeclarationError("there is nothing to evaluate on: config.data.eval is empty and config.data.eval_fraction is 0; "
                               "pass --config.data.eval=FILES.")
    job = build_job(config, jax.device_count()).on_devices()
    figures = make_evaluate(job, data.eval)(restored.load_params(path, step, job))
    if flags.json:
        print(json.dumps({"source": str(path), "step": step, **figures}))
        return
    print(f"{path}{'' if step is None else f', step {step}'}, on {figures['eval_targets']:,} targets "
          f"from {data.facts['eval_source']}")
    print(f"loss           {figures['eval_loss']:.4f} nats per {'byte' if data.tokenizer.kind == 'bytes' else 'token'}")
    print(f"perplexity     {figures['eval_perplexity']:.4f}")
    if "eval_bits_per_byte" in figures:
        print(f"bits per byte  {figures['eval_bits_per_byte']:.4f}")


def arguments() -> argparse.ArgumentParser:
    out = commandline.parser("jaxlm.evaluate", "Scores a checkpoint; --config.data.eval=FILES scores other text.", config=False)
    restored.add_arguments(out)
    out.add_argument("--json", action="store_true", help="print one JSON object")
    return out


if __name__ == "__main__":
    sys.exit(commandline.run(main, arguments()))
