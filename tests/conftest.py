"""Its being here puts tests/ on the import path: `import two_hop_world` works in every test."""
