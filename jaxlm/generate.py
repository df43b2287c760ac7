"""`python -m jaxlm.generate SOURCE`: text from a checkpoint, or an answer with --chat, streamed as it comes."""

import argparse
import pathlib
import sys

from jaxlm import commandline, restored
from jaxlm.sampling import Sampler, check_sampling, generation_layout
from partitioning.declaration import DeclarationError


def main(flags: argparse.Namespace) -> None:
    sampling = dict(max_new_tokens=flags.max_new_tokens, temperature=flags.temperature, top_k=flags.top_k, top_p=flags.top_p)
    check_sampling(**sampling, seed=flags.seed)
    prompt = read_prompt(flags)
    path, step, config = restored.open_config(flags)
    import jax

    from jaxlm.data.encoder import declared_tokenizer
    from jaxlm.job import build_job
    from jaxlm.prompt import chat_prompt, text_prompt
    tokenizer = declared_tokenizer(config.data)
    ids, ends = (chat_prompt if flags.chat else text_prompt)(config.data, tokenizer, prompt)
    job = build_job(config, jax.device_count()).on_devices()
    params = restored.load_params(path, step, job)
    decoder = tokenizer.stream()
    print("" if flags.chat else prompt, end="", flush=True)
    for token in Sampler(job.model, generation_layout(job)).generate(params, ids, seed=flags.seed, ends=ends, **sampling):
        print(decoder.feed(token), end="", flush=True)
    print(decoder.finish())


def read_prompt(flags: argparse.Namespace) -> str:
    """The prompt from --prompt, --prompt_file ('-' is stdin), or stdin when something is piped in; else a line break."""
    if flags.prompt is not None and flags.prompt_file is not None:
        raise DeclarationError("give --prompt or --prompt_file, not both.")
    if flags.prompt is not None:
        prompt = flags.prompt
    elif flags.prompt_file in (None, "-"):
        prompt = "\n" if flags.prompt_file is None and sys.stdin.isatty() else sys.stdin.read() or "\n"
    else:
        try:
            prompt = pathlib.Path(flags.prompt_file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DeclarationError(f"--prompt_file={flags.prompt_file} cannot be read: {error}.") from None
    if not prompt:
        raise DeclarationError("the prompt is empty; give at least one character.")
    return prompt


def arguments() -> argparse.ArgumentParser:
    out = commandline.parser("jaxlm.generate", "Continues a prompt.", config=False)
    restored.add_arguments(out)
    out.add_argument("--prompt", metavar="TEXT", help="text to continue (default: what is piped in, else a line break)")
    out.add_argument("--prompt_file", metavar="FILE", help="read the prompt from a file; - is stdin")
    out.add_argument("--chat", action="store_true", help="the prompt is what a user says; the model answers (chat template)")
    out.add_argument("--max_new_tokens", type=int, default=256, metavar="N")
    out.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 always takes the likeliest")
    out.add_argument("--top_k", type=int, metavar="K", help="draw from the K likeliest")
    out.add_argument("--top_p", type=float, metavar="P", help="draw from the likeliest that together hold P")
    out.add_argument("--seed", type=int, default=0, metavar="N")
    return out


if __name__ == "__main__":
    sys.exit(commandline.run(main, arguments()))
