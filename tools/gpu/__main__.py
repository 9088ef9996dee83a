import sys

from tools.gpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
