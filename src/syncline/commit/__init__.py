"""Making a version visible or not at all: a journal of what is overwritten, and writing that can be undone.

Nothing is written before the whole journal is there; what was written is read back; a failure puts the
old bits back. Engines bring the memory or the files, this package brings the order.
"""
