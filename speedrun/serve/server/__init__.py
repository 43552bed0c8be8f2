"""The server: HTTP on one side (app.py, protocol.py), texts being written on the other (engine.py).

Starlette and uvicorn speak HTTP in the main thread; one thread writes all texts of all runs, a
token of each at a time.
"""
