"""Starting the ranks: on this machine through torch's elastic launcher."""
