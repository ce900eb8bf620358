"""Starting the ranks: on this machine as processes, told and ended together."""
