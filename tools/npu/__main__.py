"""For a machine with an NPU: builds the package, runs the parity suite on the device, measures.

    python -m tools.npu --json npu.json

in an environment with torch, torch_npu, CANN's variables (set_env.sh) and what
tools/requirements-dev.txt lists; with vllm-ascend for something to compare with. See
docs/guides/ascend.md.
"""

from __future__ import annotations

import sys

from tools.npu.check import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
