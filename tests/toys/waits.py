"""A process of a cell that says that it runs by locking a file, and waits."""

import fcntl
import time

from launch.tables import child

if __name__ == "__main__":
    with open(child.settings()["path"], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("running")
        file.flush()
        time.sleep(120)
