"""Workers that are forks of one process, which has imported TensorFlow.

Most of the time until a first step is the import of TensorFlow and Keras: N workers of
one machine that each import them wait N times as long as one, where cores are few.

Reading order:
    script: whether a script can be given modules that are imported before it runs
    sitecustomize: the process that imports, and forks
    parent: that process as the launcher sees it
"""
