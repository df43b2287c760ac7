"""From gradients to the next parameters: schedules, clipping, update rules, weight decay, loss scaling.

`make_optimizer` assembles all of it from the configuration; `loss_scale` is for float16. See `docs/optimizers.md`.
"""

from jaxlm.optimizers import loss_scale
from jaxlm.optimizers.optimizer import Optimizer, global_norm, make_optimizer
from jaxlm.optimizers.schedules import make_schedule

__all__ = ["Optimizer", "global_norm", "loss_scale", "make_optimizer", "make_schedule"]
