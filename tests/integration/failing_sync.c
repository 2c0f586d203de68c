/* Preloaded into a test's process: while the file named by FAIL_SYNC exists, syncing fails with EIO. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
#include <sys/syscall.h>

static int failing(void)
{
    const char *flag = getenv("FAIL_SYNC");
    return flag != NULL && access(flag, F_OK) == 0;
}

int fsync(int fd)
{
    if (failing()) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd)
{
    if (failing()) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_fdatasync, fd);
}
