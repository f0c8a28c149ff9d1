"""`python -m meshwright` is `meshwright`."""

from planner.cli import main

if __name__ == "__main__":
    main()
