"""`python -m server`: the same as the `torchtpu-rs` command."""

from server.cli import main

if __name__ == "__main__":
    main()
