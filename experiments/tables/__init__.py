"""The study of tables: bayou as it comes beside the models that people use for tables.

``sources.py`` has the tables, ``rows.py`` one split as arrays for other libraries, ``scores.py`` the
scores, ``contestants.py`` and ``peers.py`` the models, ``jobs.py`` one fit in a process of its own,
``study.py`` the experiment and ``page.py`` its page.
"""
