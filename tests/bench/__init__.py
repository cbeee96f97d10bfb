"""Tests of the bench scripts: `make test-bench`. They need a C compiler and nginx, which the router does not."""
