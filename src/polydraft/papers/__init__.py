"""The wing: methods of papers that our own pages show slower, lossy or beside the point, a folder each, registered by `entry_points.txt` alone.

Nothing else in the package imports it. A folder may be taken out with its lines of the table, as a plug-in that is uninstalled.
"""
