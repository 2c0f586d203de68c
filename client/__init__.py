"""Not a package: the SDK is `virial`, in this folder."""

raise ImportError("`client` is only a folder: `import virial`")
