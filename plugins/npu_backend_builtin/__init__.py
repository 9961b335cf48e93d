"""The built-in strategies: five plugins, each its own entry point, none with a privilege.

They use only what ``npu_backend`` exports, as any vendor's plugin does. Selection lives in the
module of a plugin's name and imports no torch; what runs lives in ``impl``.
"""
