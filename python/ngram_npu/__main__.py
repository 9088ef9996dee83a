"""`python -m ngram_npu`: the command `ngram-npu`."""

import sys

from ngram_npu.cli import main

if __name__ == "__main__":
    sys.exit(main())
