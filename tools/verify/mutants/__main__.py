import sys

from tools.verify.mutant import main
from tools.verify.mutants.catch import caught
from tools.verify.mutants.faults import MUTANTS

if __name__ == "__main__":
    sys.exit(main("mutants", MUTANTS, caught))
