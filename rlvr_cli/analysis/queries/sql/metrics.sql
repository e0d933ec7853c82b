-- Metrics against step and wall-clock: those whose name matches a pattern, in which % stands for any text.
-- :names = "reward/%"
-- :phase = null
-- plot: x=step y=value panels=name,phase

SELECT run_id, name, phase, step, wall_seconds, value
FROM metrics
WHERE name LIKE $names AND phase = coalesce($phase::VARCHAR, phase)
ORDER BY name, phase, run_id, step;
