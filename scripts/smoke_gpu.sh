#!/usr/bin/env bash
# UNPROVEN: nobody has run this on a GPU yet. Whoever does: put the GPU, the date and the MFU here in place of this line.
#
# A smoke test of a machine with an NVIDIA GPU: trains a few steps of GPT-2 124M's shape in bfloat16 on the packaged
# text, stops and resumes, evaluates, generates, and reports the MFU. Takes a few minutes, most of them compiling.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup_environment
gpu_usable || fail "no usable NVIDIA GPU (nvidia-smi finds none, or its driver is older than 580)"
"$python" -c 'import jax; d = jax.devices()[0]; print("device:", d.device_kind); assert d.platform == "gpu", d.platform'

workdir=$(mktemp -d "${TMPDIR:-/tmp}/jaxlm-smoke.XXXXXX")
trap 'echo "the run is kept in $workdir"' EXIT
train() {
  "$python" -m jaxlm.train --config=gpt2_124m --workdir="$workdir" --config.data.train=embedded:shakespeare \
    --config.data.tokenizer=bytes --config.precision.compute=bfloat16 --config.train.steps=40 --config.optimizer.warmup_steps=5 \
    --config.train.global_batch_size=16 --config.train.gradient_accumulation=1 --config.train.log_every=5 \
    --config.train.eval_steps=4 --config.checkpoint.every=20 "$@"
}
train --config.train.stop_at=20
train --config.train.stop_at=40
"$python" -m jaxlm.evaluate "$workdir"
"$python" -m jaxlm.generate "$workdir" --prompt='ROMEO:' --max_new_tokens=64

"$python" - "$workdir/metrics.jsonl" <<'END'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
rows = [row for row in rows if row.get("loss") is not None]
steps = [row["step"] for row in rows]
assert steps == sorted(set(steps)) and steps[-1] >= 39, f"steps {steps}: the resumed run did not go on where it stopped"
assert rows[-1]["loss"] < rows[0]["loss"] - 1, f"the loss went from {rows[0]['loss']} to {rows[-1]['loss']} only"
mfu = [row["mfu"] for row in rows if row.get("mfu") is not None]
assert mfu, "no MFU: the peak of this GPU is not in jaxlm/flops.py"
print(f"loss {rows[0]['loss']:.3f} to {rows[-1]['loss']:.3f} in {steps[-1]} steps; median MFU {statistics.median(mfu):.1%}")
END
