#!/usr/bin/env bash
# Sets up the environment, then runs the tests: all of them, or what pytest's arguments say.
#     bash scripts/test.sh                              everything
#     bash scripts/test.sh -m 'not slow' tests/jaxlm    a part
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup_environment dev
cd "$root"
exec "$python" -m pytest -n 2 --dist loadscope --max-worker-restart=0 "$@"
