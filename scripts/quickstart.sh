#!/usr/bin/env bash
# From nothing to a trained model and a sample of its text: makes .venv, trains the packaged Shakespeare default in
# runs/quickstart, and generates. Run again, it goes on where it stopped. Arguments are handed to the training command:
#     bash scripts/quickstart.sh
#     bash scripts/quickstart.sh --workdir=runs/notes --config.data.train='notes/*.txt'
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup_environment

workdir=$root/runs/quickstart
arguments=()
while (( $# )); do
  case $1 in
    --workdir=*) workdir=${1#*=} ;;
    --workdir) workdir=${2:?--workdir needs a folder}; shift ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
if [[ $PWD == "$root" ]]; then workdir=${workdir#"$root/"}; fi

"$python" -m jaxlm.train --config=shakespeare --workdir="$workdir" ${arguments[@]+"${arguments[@]}"}

"$python" - "$workdir" <<'END'
import math
import sys
from jaxlm.logs import read_rows
rows = [row for row in read_rows(sys.argv[1] + "/metrics.jsonl") if row.get("eval_bits_per_byte") is not None]
if rows:
    nats = rows[-1]["eval_bits_per_byte"] * math.log(2)
    print(f"\nLoss on the held-out text at step {rows[-1]['step']}: {nats:.4f} nats per byte")
END

echo
echo "A sample of what it learnt:"
"$python" -m jaxlm.generate "$workdir" --prompt=$'ROMEO:\n' --max_new_tokens=300 --temperature=0.8 --seed=0

cat <<END

Where everything lies, in $workdir:
  metrics.jsonl   every logged number, one JSON object a line (docs/logging.md says which)
  tensorboard/    the same as curves
  checkpoints/    the model, to resume, evaluate and generate from
  sharding.txt    where every array lies, and why
  config.json     the configuration, to run again
More text: $(printf '%q ' "$python" -m jaxlm.generate "$workdir")--prompt='To be'
END
