"""`python -m demo` is `torchtpu-rs-shim`."""

from demo.shim import main

main()
