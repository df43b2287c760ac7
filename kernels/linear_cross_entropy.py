"""Cross-entropy from hidden states and the output matrix, without the logits of all tokens.

A training step needs of the logits only a few sums and two products, and with a large vocabulary they are its largest array.
Here some tokens at a time have logits: their loss is taken, and at once the gradients of it, so that no product is computed
twice (Wijmans et al. 2024, arXiv:2411.09009, and Hsu et al. 2024, arXiv:2410.10989, avoid the logits likewise). How many tokens
follows from the vocabulary: the memory is the same for any.

That the gradients are made in the forward pass has a price: all sums have to be wanted with one factor. A vocabulary in
shards stays so; the largest logit, the sum and the target's logit of each token travel.
"""

import dataclasses
import functools
import math
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from kernels.placement import axes_of, per_device

ELEMENTS = 2 ** 25                             # logits at a time on one device, 128 MiB in float32


@dataclasses.dataclass(frozen=True)
class _Form:
    """Static facts; `batch`, `length` and `vocab` are the mesh axes that split those."""
    tied: bool
    size: int
    softcap: float | None
    z_loss: float
    mesh: Mesh | AbstractMesh | None
    batch: tuple[str, ...]
    length: tuple[str, ...]
    vocab: tuple[str, ...]

    def specs(self, *names: str) -> tuple[PartitionSpec, ...]:
        """Of hidden states, matrix and per-token arrays."""
        rows = self.batch or None, self.length or None
        matrix = (self.vocab or None, None) if self.tied else (None, self.vocab or None)
        known = {"hidden": PartitionSpec(*rows), "matrix": PartitionSpec(*matrix), "token": PartitionSpec(*rows),
                 "total": PartitionSpec(), "d_matrix": PartitionSpec(self.batch + self.length or None, *matrix)}
        return tuple(known[name] for name in names)


def is_worthwhile(tokens: int, vocabulary: int, mesh: Mesh | AbstractMesh | None, spec: PartitionSpec) -> bool:
    """Whether the logits of one device, by their spec, are more than `linear_cross_entropy` has at a time."""
    axes = [axis for dim in range(3) for axis in axes_of(mesh, spec, dim)]
    return tokens * vocabulary // math.prod(mesh.shape[axis] for axis in axes) > ELEMENTS


def linear_cross_entropy(x_BLD: jax.Array, matrix: jax.Array, targets_BL: jax.Array, mask_BL: jax.Array, *,
                         tied: bool = False, size: int | None = None, softcap: float | None = None, z_loss: float = 0.0,
                         mesh: Mesh | AbstractMesh | None = None,
                         spec: PartitionSpec = PartitionSpec()) -> tuple[jax.Array, jax.Array]:
    """Sums of the losses and of the penalties over the tokens that count.

    Logits are float32 products in the dtype of `x`; see `kernels.cross_entropy` for what loss and log-partition mean.

    Args:
      x_BLD: hidden states.
      matrix: [D, V], of the dtype of x or a wider one, and rounded to that of x. Its gradient is added up in float32 and has its
        own dtype.
      targets_BL: integers in [0, size). Another value gives NaN as the loss, and the gradient of no target.
      mask_BL: boolean; where not, a token counts for nothing, whatever its target.
      tied: the matrix is a table [V, D].
      size: how large the vocabulary is, V if None; logits from there on are padding.
      softcap: logits become cap * tanh(logits / cap).
      z_loss: weight of the squared log-partition.
      mesh, spec: how logits [B, L, V] would lie.

    Returns:
      (sum of losses, sum of penalties), float32 scalars. If their cotangents differ while z_loss is not 0, all gradients are NaN.
    """
    size = matrix.shape[0 if tied else 1] if size is None else size
    form = _Form(tied, size, softcap, float(z_loss), mesh, *(axes_of(mesh, spec, dim) for dim in range(3)))
    return _sums(form, x_BLD, matrix, targets_BL, mask_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(form, x_BLD, matrix, targets_BL, mask_BL):
    run = per_device(form.mesh, functools.partial(_of_device, form, False), form.specs("hidden", "matrix", "token", "token"),
                     form.specs("total", "total"))
    return run(x_BLD, matrix, targets_BL, mask_BL)


def _forward(form, x_BLD, matrix, targets_BL, mask_BL):
    run = per_device(form.mesh, functools.partial(_of_device, form, True), form.specs("hidden", "matrix", "token", "token"),
                     form.specs("total", "total", "hidden", "d_matrix"))
    loss, penalty, d_x, d_matrix = run(x_BLD, matrix, targets_BL, mask_BL)
    return (loss, penalty), (d_x, d_matrix, jnp.zeros((0,), matrix.dtype))


def _backward(form, residuals, cotangents):
    d_x, d_matrix, like_matrix = residuals
    d_loss, d_penalty = cotangents
    factor = jnp.where(d_loss == d_penalty, d_loss, jnp.nan) if form.z_loss else d_loss
    # What each device has of the matrix' gradient is added up here, as the last thing: the compiler scatters a sum only if
    # nothing stands between it and the slice.
    d_matrix = jnp.sum((d_matrix * factor).astype(like_matrix.dtype), axis=0)
    return (d_x * factor).astype(d_x.dtype), d_matrix, None, None


_sums.defvjp(_forward, _backward)


def _of_device(form, with_gradients, x_BLD, matrix, targets_BL, mask_BL):
    """What one device has: sums, and perhaps the gradients of its hidden states and [1, ...] its part of the matrix' gradient."""
    B, L, D = x_BLD.shape
    V = matrix.shape[0 if form.tied else 1]
    weights = matrix.astype(x_BLD.dtype)
    count = max(1, -(-B * L * V // ELEMENTS))
    rows = -(-B * L // count)

    def cut(x):                                # [chunks, rows, ...]
        x = x.reshape(B * L, *x.shape[2:])
        return jnp.pad(x, ((0, count * rows - B * L),) + ((0, 0),) * (x.ndim - 1)).reshape(count, rows, *x.shape[1:])

    first = _place(form, V)
    inner, outer = ("nd,vd->nv", "nv,nd->vd") if form.tied else ("nd,dv->nv", "nd,nv->dv")

    def chunk(carry, given):
        x_ND, targets_N, mask_N = given
        raw_NV = jnp.einsum(inner, x_ND, weights, preferred_element_type=jnp.float32)
        logits_NV = raw_NV if form.softcap is None else form.softcap * jnp.tanh(raw_NV / form.softcap)
        number_V = first + jnp.arange(V, dtype=targets_N.dtype)
        seen_NV = jnp.where(number_V < form.size, logits_NV, -jnp.inf)
        is_target_NV = (number_V == targets_N[:, None]) & (number_V < form.size)
        top_N = _over(jax.lax.pmax, form.vocab, jnp.max(seen_NV, axis=-1))
        total_N = _over(jax.lax.psum, form.vocab, jnp.sum(jnp.exp(seen_NV - top_N[:, None]), axis=-1))
        target_N = _over(jax.lax.psum, form.vocab, jnp.sum(jnp.where(is_target_NV, logits_NV, 0.0), axis=-1))
        log_z_N = top_N + jnp.log(total_N)
        loss_N = jnp.where((targets_N >= 0) & (targets_N < form.size), log_z_N - target_N, jnp.nan)
        loss = carry["loss"] + jnp.sum(jnp.where(mask_N, loss_N, 0.0))
        penalty = carry["penalty"] + form.z_loss * jnp.sum(jnp.where(mask_N, jnp.square(log_z_N), 0.0))
        carry = {**carry, "loss": loss, "penalty": penalty}
        if not with_gradients:
            return carry, None
        d_NV = jnp.exp(seen_NV - log_z_N[:, None]) * (1 + 2 * form.z_loss * log_z_N)[:, None] - is_target_NV
        if form.softcap is not None:
            d_NV = d_NV * (1 - jnp.square(logits_NV / form.softcap))
        # Two products consume this; without the barrier the exponentials may be computed in both.
        d_NV = jax.lax.optimization_barrier(jnp.where(mask_N[:, None], d_NV, 0.0).astype(x_ND.dtype))
        d_x_ND = jnp.einsum("nv,vd->nd" if form.tied else "nv,dv->nd", d_NV, weights)
        of_chunk = jnp.einsum(outer, *((d_NV, x_ND) if form.tied else (x_ND, d_NV)), preferred_element_type=jnp.float32)
        return {**carry, "matrix": carry["matrix"] + of_chunk}, d_x_ND

    zero = jnp.zeros((), jnp.float32)
    carry = {"loss": zero, "penalty": zero}
    if with_gradients:
        carry["matrix"] = jnp.zeros(matrix.shape, jnp.float32)
    carry, d_x = jax.lax.scan(chunk, carry, (cut(x_BLD), cut(targets_BL), cut(mask_BL)))
    sums = tuple(_over(jax.lax.psum, form.batch + form.length, carry[name]) for name in ("loss", "penalty"))
    if not with_gradients:
        return sums
    d_x_BLD = d_x.reshape(count * rows, D)[:B * L].reshape(B, L, D)
    return *sums, _over(jax.lax.psum, form.vocab, d_x_BLD), carry["matrix"][None]


def _over(reduction, axes: Collection[str], x: jax.Array) -> jax.Array:
    return reduction(x, axes) if axes else x


def _place(form: _Form, V: int) -> jax.Array | int:
    """The number of the first column that this device has."""
    return jax.lax.axis_index(form.vocab) * V if form.vocab else 0
