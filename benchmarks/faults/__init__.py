"""Training that is killed at every moment of a save, and started again, exactly.

case       where it is killed: at a named point, before a file-system call, at a random time
training   what is trained, and what each rank has at its end
calls      the file-system calls of a save, to count, to fail, or to die at
server     ranks within a fifth of a second, forked from a process that has imported torch
launched   the same training under the project's own launcher, to kill that
trial      one case: kill, look at the folder, start again, compare
"""
