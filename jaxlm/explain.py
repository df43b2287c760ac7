"""`python -m jaxlm.explain`: where every array of a configuration lies, why, and what it weighs on each device.

    python -m jaxlm.explain --config=llama3_70b --simulate_devices=512

Nothing is compiled or allocated and no accelerator is needed: the answer comes from shapes and the declared tables. It
is the layout that training on that number of devices uses.
"""

import json
import sys

from jaxlm.commandline import configured, parser, run


def arguments():
    """The command's flags."""
    out = parser("jaxlm.explain", "Print every array's shape, dims, sharding and bytes per device, and what decided it.")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return out


def main(flags) -> None:
    """Prints the report for the devices that are there, or for as many as --simulate_devices says."""
    config = configured(flags.config, flags.overrides)
    import jax                                 # after the configuration has been read: mistakes in it answer at once

    from jaxlm.job import build_job
    from partitioning import report
    layout = build_job(config, flags.simulate_devices or jax.device_count()).layout
    if flags.json:
        print(json.dumps(report.to_json(layout)))
    else:
        print(report.text(layout), end="")


if __name__ == "__main__":
    sys.exit(run(main, arguments()))
