"""Not a package: the contract is `virialpb`, in this folder."""

raise ImportError("`protos` is only a folder: `import virialpb`")
