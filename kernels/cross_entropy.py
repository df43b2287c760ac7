"""Cross-entropy of a softmax over a large vocabulary.

The loss of one target is log Z - logit[target], with log Z = log sum exp(logits). The gradient is known in closed form,

    d logits = softmax(logits) * (d loss + d log Z) - onehot(target) * d loss,

and is written so: what stays from the forward pass are the logits themselves and one number per target, and the backward
pass is elementwise. When the vocabulary is sharded each device keeps to its part: only sums over the vocabulary travel.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits: jax.Array, targets: jax.Array, size: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Loss and log-partition per target.

    Args:
      logits: float32 [..., V].
      targets: integers [...], in [0, V). Another value gives NaN as that target's loss, and the gradient of no target.
      size: how large the vocabulary is, V if None. Logits from there on are padding: whatever they are, they have no
        probability and gradient 0, and a target among them is outside the vocabulary.

    Returns:
      (loss, log_z), both float32 [...], in nats. The square of log_z is the z-loss of Chowdhery et al. 2022
      (PaLM, arXiv:2204.02311, section 5).
    """
    logits, targets = _without_padding(logits, targets, size)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return log_z - _of_target(logits, targets), log_z


def _of_target(logits, targets):
    """The logit of each target, NaN for one outside of the vocabulary. A sum over the vocabulary, in which all but one term is
    zero: where the vocabulary is sharded only the sums travel, and XLA (jax 0.11.2) cannot partition the lookup in a program
    that is manual over another axis."""
    onehot = jnp.arange(logits.shape[-1], dtype=targets.dtype) == targets[..., None]
    inside = (targets >= 0) & (targets < logits.shape[-1])
    return jnp.where(inside, jnp.sum(jnp.where(onehot, logits, 0.0), axis=-1), jnp.nan)


def _without_padding(logits, targets, size):
    """Both, with the padding's logits at -inf, which is no probability, and the targets among them outside the logits."""
    if size is None or size == logits.shape[-1]:
        return logits, targets
    V = logits.shape[-1]
    return jnp.where(jnp.arange(V) < size, logits, -jnp.inf), jnp.where(targets < size, targets, V)


def _forward(logits, targets, size):
    loss, log_z = cross_entropy(logits, targets, size)
    return (loss, log_z), (logits, targets, log_z)


def _backward(size, residuals, cotangents):
    logits, targets, log_z = residuals
    d_loss, d_log_z = cotangents
    logits, targets = _without_padding(logits, targets, size)
    softmax = jnp.exp(logits - log_z[..., None])
    onehot = jnp.arange(logits.shape[-1], dtype=targets.dtype) == targets[..., None]
    d_logits = softmax * (d_loss + d_log_z)[..., None] - jnp.where(onehot, d_loss[..., None], 0.0)
    # Two matmuls consume this. Without the barrier the compiler may fuse the exponentials into both and pay for them twice.
    return jax.lax.optimization_barrier(d_logits), None


cross_entropy.defvjp(_forward, _backward)
