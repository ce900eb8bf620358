"""Workers that train apart and meet seldom: DiLoCo, for slow links."""
