"""`python -m jaxlm.data show`: a look at the examples that training would see."""

import argparse
import sys

from jaxlm import commandline
from partitioning.declaration import DeclarationError


def main(flags: argparse.Namespace) -> None:
    if flags.examples < 0:
        raise DeclarationError(f"--examples={flags.examples}; expected at least 0.")
    config = commandline.load_config(flags.config, flags.overrides)
    from jaxlm.data import open_data
    from jaxlm.data.show import show, show_preferences

    if config.data.content == "preference":
        lines = show_preferences(config, flags.examples)
    else:
        lines = show(open_data(config.data, config.model.vocab_size), config, flags.examples)
    for line in lines:
        print(line)


def arguments() -> argparse.ArgumentParser:
    out = commandline.parser("jaxlm.data", "Shows the examples that training would see, and counts.")
    out.add_argument("action", choices=("show",), help="what to do")
    out.add_argument("--examples", type=int, default=3, metavar="N", help="how many (default: 3)")
    return out


if __name__ == "__main__":
    sys.exit(commandline.run(main, arguments()))
