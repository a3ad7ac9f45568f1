"""python -m essa_mpi"""

from .cli import main

if __name__ == "__main__":
    main()
