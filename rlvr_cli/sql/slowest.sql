-- Where the time went: seconds of each kind of work (metrics NAME/seconds), in all and per step, the most first.
-- :phase = null

-- step/seconds is the whole of a training step, so the other shares are parts of it.
WITH work AS (
    SELECT run_id, phase, step, value, name[:-9] AS work
    FROM metrics
    WHERE ends_with(name, '/seconds') AND phase = coalesce($phase::VARCHAR, phase)
), walls AS (
    SELECT run_id, max(wall_seconds) AS wall_seconds FROM metrics GROUP BY run_id
)
SELECT
    run_id,
    phase,
    work,
    count(*) AS steps,
    sum(value) AS seconds,
    sum(value) / any_value(walls.wall_seconds) AS share_of_run,
    avg(value) AS per_step,
    quantile_cont(value, 0.95) AS p95,
    max(value) AS slowest,
    arg_max(step, value) AS slowest_step
FROM work JOIN walls USING (run_id)
GROUP BY run_id, phase, work
ORDER BY run_id, seconds DESC;
