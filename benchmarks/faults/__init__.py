"""Training that is killed at every moment of a save, and started again, exactly.

case       where it is killed: at a named point, before a file-system call, at a random time
training   what is trained, and what each rank has at its end
calls      the file-system calls of a save, to count, to fail, or to die at
server     one start of a run: ranks forked from a process that has imported torch, or launched
trial      one case: kill, look at the folder, start again, compare
"""
