"""Flash attention in Triton's own language. `kernels.attention.jax_triton` calls these kernels.

They do what the kernels in `kernels.attention.pallas` do, tile by tile: forward, gradient of queries, gradients of keys and
values. Every size is a constant of the compiled program; offsets of rows of the batch and of heads are 64 bits wide. A kernel
is one function, for Triton's interpreter follows no calls between functions.
"""

try:
    import triton
    import triton.language as tl
except ImportError:                            # an extra (jaxlm[gpu]); without it `jax_triton` refuses every call
    triton = tl = None
constexpr = None if tl is None else tl.constexpr


def _kernel(function):
    """The function as a Triton kernel, where Triton is installed."""
    return function if triton is None else triton.jit(function)


@_kernel
def forward(q_ptr, k_ptr, v_ptr, start_ptr, end_ptr, tiles_ptr, q_ids_ptr, k_ids_ptr, out_ptr, lse_ptr,
            T: constexpr, S: constexpr, H: constexpr, G: constexpr, K: constexpr, V: constexpr,
            KP: constexpr, VP: constexpr, MASKS: constexpr, TILES: constexpr, IDS: constexpr,
            LEFT: constexpr, CAP: constexpr, SCALE: constexpr, Q: constexpr, N: constexpr):
    """`MASKS`, `TILES`: whether intervals and tiles have a row for each row of the batch (1) or one for all (0)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    g = h // (H // G)
    row = tile * Q + tl.arange(0, Q)
    there = row < T
    k_cols = tl.arange(0, KP)
    v_cols = tl.arange(0, VP)
    rows64 = row.to(tl.int64)
    q = tl.load(q_ptr + ((b * T + rows64) * H + h)[:, None] * K + k_cols[None],
                mask=there[:, None] & (k_cols < K)[None], other=0.0)
    start = tl.load(start_ptr + b * MASKS * T + row, mask=there, other=0)
    end = tl.load(end_ptr + b * MASKS * T + row, mask=there, other=0)
    q_ids = start
    if IDS:
        q_ids = tl.load(q_ids_ptr + b * T + row, mask=there, other=0)
    numbers = tiles_ptr + (b * TILES * tl.num_programs(0) + tile) * 5
    high = tl.load(numbers + 4)
    top = tl.full([Q], float("-inf"), tl.float32)
    total = tl.zeros([Q], tl.float32)
    out = tl.zeros([Q, VP], tl.float32)
    for phase in tl.static_range(3):           # tiles before those that are seen whole, those, and the ones after them
        if (phase == 0 and (LEFT or IDS)) or (phase > 0 and not IDS):
            for j in range(tl.load(numbers + phase), tl.load(numbers + phase + 1)):
                place = j * N + tl.arange(0, N)
                places64 = place.to(tl.int64)
                near = place < high if phase != 1 else place < S
                k = tl.load(k_ptr + ((b * S + places64) * G + g)[:, None] * K + k_cols[None],
                            mask=near[:, None] & (k_cols < K)[None], other=0.0)
                v = tl.load(v_ptr + ((b * S + places64) * G + g)[:, None] * V + v_cols[None],
                            mask=near[:, None] & (v_cols < V)[None], other=0.0)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
                if CAP > 0:
                    scores = CAP * (1 - 2 / (tl.exp(scores * (2 / CAP)) + 1))
                scores = scores * 1.4426950408889634
                if phase != 1:
                    seen = place[None] < end[:, None]
                    if LEFT:
                        seen = seen & (place[None] >= start[:, None])
                    if IDS:
                        k_ids = tl.load(k_ids_ptr + b * S + place, mask=place < S, other=0)
                        seen = seen & (q_ids[:, None] == k_ids[None])
                    scores = tl.where(seen, scores, float("-inf"))
                new = tl.maximum(top, tl.max(scores, 1))
                safe = tl.where(new == float("-inf"), 0.0, new)
                weights = tl.exp2(scores - safe[:, None])
                shrink = tl.exp2(top - safe)
                out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                total = total * shrink + tl.sum(weights, 1)
                top = new
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    tl.store(out_ptr + ((b * T + rows64) * H + h)[:, None] * V + v_cols[None],
             (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=there[:, None] & (v_cols < V)[None])
    lse = tl.where(none, float("-inf"), top * 0.6931471805599453 + tl.log(total))
    tl.store(lse_ptr + (b * H + h) * T + row, lse, mask=there)


@_kernel
def d_query(q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, start_ptr, end_ptr, tiles_ptr, q_ids_ptr, k_ids_ptr, d_q_ptr,
            T: constexpr, S: constexpr, H: constexpr, G: constexpr, K: constexpr, V: constexpr,
            KP: constexpr, VP: constexpr, MASKS: constexpr, TILES: constexpr, IDS: constexpr,
            LEFT: constexpr, CAP: constexpr, SCALE: constexpr, Q: constexpr, N: constexpr):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    g = h // (H // G)
    row = tile * Q + tl.arange(0, Q)
    there = row < T
    k_cols = tl.arange(0, KP)
    v_cols = tl.arange(0, VP)
    rows64 = row.to(tl.int64)
    of_q = ((b * T + rows64) * H + h)[:, None] * K + k_cols[None]
    in_q = there[:, None] & (k_cols < K)[None]
    q = tl.load(q_ptr + of_q, mask=in_q, other=0.0)
    d_out = tl.load(d_out_ptr + ((b * T + rows64) * H + h)[:, None] * V + v_cols[None],
                    mask=there[:, None] & (v_cols < V)[None], other=0.0)
    lse = tl.load(lse_ptr + (b * H + h) * T + row, mask=there, other=float("inf")) * 1.4426950408889634
    delta = tl.load(delta_ptr + (b * H + h) * T + row, mask=there, other=0.0)
    start = tl.load(start_ptr + b * MASKS * T + row, mask=there, other=0)
    end = tl.load(end_ptr + b * MASKS * T + row, mask=there, other=0)
    q_ids = start
    if IDS:
        q_ids = tl.load(q_ids_ptr + b * T + row, mask=there, other=0)
    numbers = tiles_ptr + (b * TILES * tl.num_programs(0) + tile) * 5
    high = tl.load(numbers + 4)
    d_q = tl.zeros([Q, KP], tl.float32)
    for phase in tl.static_range(3):
        if (phase == 0 and (LEFT or IDS)) or (phase > 0 and not IDS):
            for j in range(tl.load(numbers + phase), tl.load(numbers + phase + 1)):
                place = j * N + tl.arange(0, N)
                places64 = place.to(tl.int64)
                near = place < high if phase != 1 else place < S
                k = tl.load(k_ptr + ((b * S + places64) * G + g)[:, None] * K + k_cols[None],
                            mask=near[:, None] & (k_cols < K)[None], other=0.0)
                v = tl.load(v_ptr + ((b * S + places64) * G + g)[:, None] * V + v_cols[None],
                            mask=near[:, None] & (v_cols < V)[None], other=0.0)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
                slope = 1.0
                if CAP > 0:
                    capped = 1 - 2 / (tl.exp(scores * (2 / CAP)) + 1)
                    scores = CAP * capped
                    slope = 1 - capped * capped
                scores = scores * 1.4426950408889634
                if phase != 1:
                    seen = place[None] < end[:, None]
                    if LEFT:
                        seen = seen & (place[None] >= start[:, None])
                    if IDS:
                        k_ids = tl.load(k_ids_ptr + b * S + place, mask=place < S, other=0)
                        seen = seen & (q_ids[:, None] == k_ids[None])
                    scores = tl.where(seen, scores, float("-inf"))
                weights = tl.exp2(scores - lse[:, None])
                d_scores = weights * (tl.dot(d_out, tl.trans(v), input_precision="ieee") - delta[:, None]) * slope
                d_q += tl.dot(d_scores.to(k.dtype), k, input_precision="ieee")
    tl.store(d_q_ptr + of_q, (d_q * SCALE).to(d_q_ptr.dtype.element_ty), mask=in_q)


@_kernel
def d_key_value(q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, start_ptr, end_ptr, tiles_ptr, q_ids_ptr, k_ids_ptr,
                d_k_ptr, d_v_ptr,
                T: constexpr, S: constexpr, H: constexpr, G: constexpr, K: constexpr, V: constexpr,
                KP: constexpr, VP: constexpr, MASKS: constexpr, TILES: constexpr, IDS: constexpr,
                LEFT: constexpr, CAP: constexpr, SCALE: constexpr, Q: constexpr, N: constexpr):
    tile = tl.program_id(0)
    g = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = tile * N + tl.arange(0, N)
    near = place < S
    k_cols = tl.arange(0, KP)
    v_cols = tl.arange(0, VP)
    places64 = place.to(tl.int64)
    of_k = ((b * S + places64) * G + g)[:, None] * K + k_cols[None]
    of_v = ((b * S + places64) * G + g)[:, None] * V + v_cols[None]
    in_k = near[:, None] & (k_cols < K)[None]
    in_v = near[:, None] & (v_cols < V)[None]
    k = tl.load(k_ptr + of_k, mask=in_k, other=0.0)
    v = tl.load(v_ptr + of_v, mask=in_v, other=0.0)
    k_ids = place
    if IDS:
        k_ids = tl.load(k_ids_ptr + b * S + place, mask=near, other=0)
    numbers = tiles_ptr + (b * TILES * tl.num_programs(0) + tile) * 4
    d_k = tl.zeros([N, KP], tl.float32)
    d_v = tl.zeros([N, VP], tl.float32)
    for r in range(H // G):
        h = g * (H // G) + r
        for phase in tl.static_range(3):
            if phase == 0 or not IDS:
                for i in range(tl.load(numbers + phase), tl.load(numbers + phase + 1)):
                    row = i * Q + tl.arange(0, Q)
                    there = row < T
                    rows64 = row.to(tl.int64)
                    q = tl.load(q_ptr + ((b * T + rows64) * H + h)[:, None] * K + k_cols[None],
                                mask=there[:, None] & (k_cols < K)[None], other=0.0)
                    d_out = tl.load(d_out_ptr + ((b * T + rows64) * H + h)[:, None] * V + v_cols[None],
                                    mask=there[:, None] & (v_cols < V)[None], other=0.0)
                    lse = tl.load(lse_ptr + (b * H + h) * T + row, mask=there, other=float("inf")) * 1.4426950408889634
                    delta = tl.load(delta_ptr + (b * H + h) * T + row, mask=there, other=0.0)
                    scores = tl.dot(k, tl.trans(q), input_precision="ieee") * SCALE
                    slope = 1.0
                    if CAP > 0:
                        capped = 1 - 2 / (tl.exp(scores * (2 / CAP)) + 1)
                        scores = CAP * capped
                        slope = 1 - capped * capped
                    scores = scores * 1.4426950408889634
                    if phase != 1:
                        end = tl.load(end_ptr + b * MASKS * T + row, mask=there, other=0)
                        seen = place[:, None] < end[None]
                        if LEFT:
                            start = tl.load(start_ptr + b * MASKS * T + row, mask=there, other=0)
                            seen = seen & (place[:, None] >= start[None])
                        if IDS:
                            q_ids = tl.load(q_ids_ptr + b * T + row, mask=there, other=0)
                            seen = seen & (k_ids[:, None] == q_ids[None])
                        scores = tl.where(seen, scores, float("-inf"))
                    weights = tl.exp2(scores - lse[None])
                    d_v += tl.dot(weights.to(d_out.dtype), d_out, input_precision="ieee")
                    d_scores = weights * (tl.dot(v, tl.trans(d_out), input_precision="ieee") - delta[None]) * slope
                    d_k += tl.dot(d_scores.to(q.dtype), q, input_precision="ieee")
    tl.store(d_k_ptr + of_k, (d_k * SCALE).to(d_k_ptr.dtype.element_ty), mask=in_k)
    tl.store(d_v_ptr + of_v, d_v.to(d_v_ptr.dtype.element_ty), mask=in_v)
