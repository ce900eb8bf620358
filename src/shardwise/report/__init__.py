"""A run as one HTML page, from the files of its folder: `shardwise report`.

In reading order:

    run           what the folder holds            series        numbers over the steps
    one_step      lanes and memory of one step     facts         tables: results, recipe, units
    page          the file, with its style and its script
"""
