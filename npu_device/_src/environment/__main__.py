"""Print ``docs/environment.md``."""

from npu_device._src.environment import page

if __name__ == "__main__":
    print(page(), end="")
