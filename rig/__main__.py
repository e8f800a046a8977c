"""`python -m rig` is `torchtpu-rig`."""

from rig.cli import main

if __name__ == "__main__":
    main()
