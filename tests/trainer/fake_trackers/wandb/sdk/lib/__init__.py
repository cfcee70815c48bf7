class RunDisabled:
    pass
