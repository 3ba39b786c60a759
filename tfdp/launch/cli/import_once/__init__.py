"""Workers as forks of one process that has imported TensorFlow.

The import of TensorFlow and Keras takes most of the time until the first step. On a
machine with few cores, N workers that each import them take N times as long as one.

Reading order:
    script: which modules can be imported before a script runs
    sitecustomize: the process that imports them, and forks
    fork_server: the launcher's handle of that process
"""
