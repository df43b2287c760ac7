"""Pieces of the training step as one device's own program has them: its blocks, and every collective written out.

The step itself is written for whole arrays, and the compiler adds the collectives. Here each can be left out, as in a
program where somebody forgot it. A piece is given as the arguments of `monkeypatch.setattr`; `broken` says what is wrong
with it, and without it the piece computes what it takes the place of. All are for a mesh of `fsdp` and `tensor` with the
residual stream split along its length, except `rows`, which is for `data`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxlm import train_step
from jaxlm.models import language_model, transformer
from jaxlm.optimizers import optimizer
from kernels import cross_entropy
from kernels.matmul import einsum
from partitioning.paths import flatten

# Nothing checks that what is said to be replicated is: devices that disagree are the point.
shard_map = functools.partial(jax.shard_map, check_vma=False)


def rows(job, broken=""):
    """Each device differentiates the loss of its own rows. Needs `layout._constrain` out of the way.

    broken: 'not summed', 'counted twice' (a sum of what is summed already), or 'own counts' (each divides by the targets of
    its own rows, and then the mean is taken).
    """
    def loss_and_gradients(objective, params, batch, **how):
        def of_device(params, batch):
            sums, gradients = of_batch(objective, params, batch, **how)
            own = jnp.sum(batch["mask"].astype(jnp.float32))
            factor = jax.lax.pmean(own, "data") / own if broken == "own counts" else 1.0
            gradients = jax.tree.map(lambda g: g * factor, gradients)
            for _ in range({"not summed": 0, "counted twice": 2}.get(broken, 1)):
                gradients = jax.lax.psum(gradients, "data")
            return jax.lax.psum(sums, "data"), gradients

        return shard_map(of_device, mesh=job.mesh, in_specs=(P(), P("data")), out_specs=P())(params, batch)

    of_batch = train_step.loss_and_gradients
    return train_step, "loss_and_gradients", loss_and_gradients


def row_split_matmul(job, broken=""):
    """The MLP's second matrix, which is split along what it sums over. broken: 'not summed'."""
    @jax.custom_vjp
    def product(x_BLF, w_FD):
        def of_device(x_BLF, w_FD):
            partial_BLD = jnp.einsum("blf,fd->bld", x_BLF, w_FD)
            return partial_BLD if broken else jax.lax.psum(partial_BLD, "tensor")

        specs = P("fsdp", None, "tensor"), P("tensor")
        return shard_map(of_device, mesh=job.mesh, in_specs=specs, out_specs=P("fsdp"))(x_BLF, w_FD)

    def backward(residuals, d_BLD):
        x_BLF, w_FD = residuals
        return jnp.einsum("bld,fd->blf", d_BLD, w_FD), jnp.einsum("blf,bld->fd", x_BLF, d_BLD)

    product.defvjp(lambda *operands: (product(*operands), operands), backward)

    def replaced(pattern, x, w, dtype=None):
        return product(x, w) if pattern == "blf,fd->bld" else einsum(pattern, x, w, dtype)

    return transformer, "einsum", replaced


def norm_gains(job, broken=""):
    """RMSNorm whose gain is on every device, while each has a part of the tokens. broken: 'not summed over tensor'."""
    @jax.custom_vjp
    def scaled(y_BLD, gain_D):
        return y_BLD * gain_D

    def backward(residuals, d_BLD):
        def of_device(y_BLD, d_BLD):
            return jax.lax.psum(jnp.sum(y_BLD * d_BLD, axis=(0, 1)), "fsdp" if broken else ("fsdp", "tensor"))

        y_BLD, gain_D = residuals
        d_gain_D = shard_map(of_device, mesh=job.mesh, in_specs=P("fsdp", "tensor"), out_specs=P())(y_BLD, d_BLD)
        return d_BLD * gain_D, d_gain_D

    scaled.defvjp(lambda *operands: (scaled(*operands), operands), backward)

    def norm(self, x_BLD):
        y_BLD = x_BLD * jax.lax.rsqrt(jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True) + self.epsilon)
        return scaled(y_BLD, self.scale[...])

    return transformer.Norm, "__call__", norm


def vocabulary(job, broken=""):
    """Cross-entropy where each device has the logits of a part of the vocabulary.

    broken: 'own log_z' (of the part alone), or 'own target' (the target's logit is 0 where another device has it, and is not
    summed).
    """
    @jax.custom_vjp
    def losses(logits_BLV, targets_BL):
        def of_device(logits_BLV, targets_BL):
            log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
            if broken != "own log_z":
                largest_BL = jax.lax.pmax(log_z_BL, "tensor")
                log_z_BL = largest_BL + jnp.log(jax.lax.psum(jnp.exp(log_z_BL - largest_BL), "tensor"))
            first = jax.lax.axis_index("tensor") * logits_BLV.shape[-1]
            is_target_BLV = first + jnp.arange(logits_BLV.shape[-1]) == targets_BL[..., None]
            target_BL = jnp.sum(jnp.where(is_target_BLV, logits_BLV, 0), axis=-1)
            if broken != "own target":
                target_BL = jax.lax.psum(target_BL, "tensor")
            return log_z_BL - target_BL, log_z_BL

        specs = P("fsdp", None, "tensor"), P("fsdp")
        return shard_map(of_device, mesh=job.mesh, in_specs=specs, out_specs=P("fsdp"))(logits_BLV, targets_BL)

    def forward(logits_BLV, targets_BL):
        loss_BL, log_z_BL = losses(logits_BLV, targets_BL)
        return (loss_BL, log_z_BL), (logits_BLV, targets_BL, log_z_BL)

    losses.defvjp(forward, functools.partial(cross_entropy._backward, None))
    return language_model, "cross_entropy", lambda logits, targets, size: losses(logits, targets)


def gradient_norm(job, broken=""):
    """The norm that clips, from the blocks of the gradients. broken: 'own blocks', or 'every copy' (what is on several
    devices counts as often)."""
    specs = flatten(job.layout.gradients)
    copies = {row.path: 1 if broken == "every copy" else row.copies for row in job.layout.rows if row.kind == "gradients"}

    def global_norm(gradients):
        def of_device(blocks):
            total = sum(jnp.sum(jnp.square(block)) / copies[path] for path, block in blocks.items())
            return jnp.sqrt(total if broken == "own blocks" else jax.lax.psum(total, job.mesh.axis_names))

        return shard_map(of_device, mesh=job.mesh, in_specs=(specs,), out_specs=P())(gradients)

    assert math.prod(copies.values()) > 1 or broken, "some gradient is to be on several devices"
    return optimizer, "global_norm", global_norm
