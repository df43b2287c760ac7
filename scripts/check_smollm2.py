"""A real pretrained model against figures that others computed: SmolLM2-135M-Instruct.

    python scripts/check_smollm2.py likelihoods FOLDER REFERENCE TEXTS    mean loss of each window of texts
    python scripts/check_smollm2.py greedy FOLDER REFERENCE               the likeliest continuations of prompts
    python scripts/check_smollm2.py finetune FOLDER TEXT                  20 steps under fsdp x tensor on 8 devices, and on one

FOLDER is the model's as Hugging Face has it (config.json, model.safetensors, tokenizer.json). REFERENCE is a JSON file with
`sets` (for each text of TEXTS: start_char, n_chars, windows, window_nll), and `greedy` (prompt_ids, new_ids, top2_logit_gaps).
Each check prints its figures and ends with status 1 if they are out of bounds.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import numpy as np

WINDOW, LEAST_GAP = 512, 0.3


def model_of(folder: pathlib.Path):
    import jax

    from jaxlm.huggingface.weights import Weights
    from jaxlm.models import build_model

    weights = Weights(folder)
    model, place = build_model(weights.model), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place), model.specs)
    return model, weights.restore(0, {"params": wanted})["params"]


def likelihoods(flags) -> bool:
    """Whether the mean loss of every window is within 1e-4 of the reference."""
    import jax

    from jaxlm.data import load_tokenizer

    tokenizer, (model, params) = load_tokenizer(str(flags.folder)), model_of(flags.folder)
    losses = jax.jit(lambda params, batch: model.loss(params, batch).loss / (WINDOW - 1))
    worst = 0.0
    for name, facts in json.loads(flags.reference.read_text())["sets"].items():
        text = (flags.texts / f"{name}.txt").read_text("utf-8")[facts["start_char"]:][:facts["n_chars"]]
        ids = tokenizer.encode(text)
        assert len(ids) == facts["ids_total"], "another tokenization"
        rows = ids[:facts["windows"] * WINDOW].reshape(-1, WINDOW)
        for row, expected in zip(rows, facts["window_nll"], strict=True):
            batch = dict(inputs=row[None, :-1], targets=row[None, 1:], mask=np.ones((1, WINDOW - 1), bool))
            worst = max(worst, abs(float(losses(params, batch)) - expected))
        print(f"{name}: {len(rows)} windows, largest difference so far {worst:.2e}", flush=True)
    return worst <= 1e-4


def greedy(flags) -> bool:
    """Whether, after each beginning of the reference's continuations, the likeliest id is the reference's, wherever its gap
    between the two likeliest is at least 0.3."""
    import jax
    import jax.numpy as jnp

    model, params = model_of(flags.folder)
    likeliest = jax.jit(lambda params, ids: model.logits(params, ids)[0].argmax(-1))
    good = True
    for case in json.loads(flags.reference.read_text())["greedy"]:
        ids, new = [*case["prompt_ids"], *case["new_ids"]], np.array(case["new_ids"])
        padded = jnp.asarray([ids + [0] * (128 - len(ids))], jnp.int32)
        ours = np.asarray(likeliest(params, padded))[len(case["prompt_ids"]) - 1:len(ids) - 1]
        sure = np.array(case["top2_logit_gaps"]) >= LEAST_GAP
        same = bool((ours == new)[sure].all())
        first = int(np.argmin(sure)) if not sure.all() else len(sure)
        print(f"{sure.sum()} of {len(sure)} ids have a large gap, the first {first} in a row: "
              f"{'equal' if same else 'DIFFERENT'}; {(ours == new).sum()} of all are equal", flush=True)
        good &= same
    return good


def finetune(flags) -> bool:
    """Whether 20 steps on eight devices are those on one."""
    import jax

    from jaxlm import starting_point
    from jaxlm.config import to_config
    from jaxlm.data import open_data, train_batches
    from jaxlm.data.feed import place, rows_of
    from jaxlm.job import build_job
    from jaxlm.train import compile_train_step

    def curve(count, **sections):
        config = to_config({
            "model": {"from_hf": str(flags.folder)}, "checkpoint": {"restore_from": str(flags.folder)},
            "data": {"train": (str(flags.text),), "sequence_length": 32}, "train": {"global_batch_size": 8, "steps": flags.steps},
            "optimizer": {"learning_rate": 3e-5, "warmup_steps": 2}, **sections})
        job, data = build_job(config, count).on_devices(jax.devices()[:count]), open_data(config.data, config.model.vocab_size)
        with tempfile.TemporaryDirectory() as folder:
            point = starting_point.find(config, pathlib.Path(folder))
            starting_point.check(point, job, data, False)
            state = starting_point.load(point, job)
        step, shardings, rows = compile_train_step(job), job.batch_shardings(), []
        with place(train_batches(data.mixture(8, 0), rows=rows_of(shardings["inputs"], 8)), shardings) as feed:
            for _ in range(flags.steps):
                state, metrics = step(state, next(feed))
                rows.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return np.array(rows, np.float64).T

    many = curve(8, mesh={"fsdp": 4, "tensor": 2}, sharding={"pad": ("heads", "kv_heads")})
    one = curve(1)
    difference, norm = many[0] - one[0], np.abs(many[1] / one[1] - 1).max()
    print(f"loss {one[0][0]:.4f} -> {one[0][-1]:.4f}; largest difference {np.abs(difference).max():.2e}, mean "
          f"{abs(difference.mean()):.2e}; gradient norm {norm:.2e} relative", flush=True)
    return bool(np.abs(difference).max() <= 1e-5 and abs(difference.mean()) <= 1e-6 and norm <= 1e-4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for action, names in ((likelihoods, ("folder", "reference", "texts")), (greedy, ("folder", "reference")),
                          (finetune, ("folder", "text"))):
        one = commands.add_parser(action.__name__)
        one.set_defaults(action=action)
        for name in names:
            one.add_argument(name, type=pathlib.Path)
        one.add_argument("--steps", type=int, default=20)
    flags = parser.parse_args()
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    return 0 if flags.action(flags) else 1


if __name__ == "__main__":
    sys.exit(main())
