"""Plans over devices, made in processes of their own: advice on models, Pareto fronts, and previews of plans."""
