"""The embedded default: a byte-level model of nine plays of Shakespeare, for a laptop's CPU."""

from jaxlm.config import default_config


def get_config():
    config = default_config()
    return config
