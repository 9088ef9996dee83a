import os
import sys

from tools.verify.cuda_mutants.catch import caught
from tools.verify.cuda_mutants.mutants import MUTANTS
from tools.verify.mutant import main

if __name__ == "__main__":
    sys.exit(main("cuda_mutants", MUTANTS, caught, jobs=os.cpu_count() or 1))
