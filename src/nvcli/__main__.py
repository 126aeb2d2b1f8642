"""`python -m nvcli`."""

from nvcli.cli import main

if __name__ == "__main__":
    main()
