"""``python -m npu_backend``: the command line."""

from npu_backend.cli import main

if __name__ == "__main__":
    main()
