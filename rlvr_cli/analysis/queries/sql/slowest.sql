-- Where the time went: seconds of each kind of work (metrics NAME/seconds), in total, per step and as a share of the steps.
-- :phase = null
-- plot: x=work y=seconds panels=phase bars=yes zeros=seconds

-- step/seconds is a whole training step, and the other shares are parts of it. If one batch is sampled while another is
-- trained on (--async-steps 1), they add up to more than 1. Then share_of_steps shows how busy sampler and trainer are, and
-- sampling/waiting_seconds, shown as "waiting for the sampler", is how long the trainer was idle.
WITH work AS (
    SELECT
        run_id, phase, step, value,
        CASE name
            WHEN 'sampling/waiting_seconds' THEN 'waiting for the sampler'
            WHEN 'synchronisation/seconds' THEN 'weight_sync' -- its name until 0.1.0
            ELSE name[:-9]
        END AS work
    FROM metrics
    WHERE (ends_with(name, '/seconds') OR name = 'sampling/waiting_seconds') AND phase = coalesce($phase::VARCHAR, phase)
), walls AS (
    SELECT
        run_id,
        max(wall_seconds) AS wall_seconds,
        sum(value) FILTER (phase = 'train' AND name = 'step/seconds') AS steps_seconds
    FROM metrics GROUP BY run_id
)
SELECT
    run_id,
    phase,
    work,
    count(*) AS steps,
    sum(value) AS seconds,
    sum(value) / any_value(walls.wall_seconds) AS share_of_run,
    CASE WHEN phase = 'train' THEN sum(value) / any_value(walls.steps_seconds) END AS share_of_steps,
    avg(value) AS per_step,
    quantile_cont(value, 0.95) AS p95,
    max(value) AS slowest,
    arg_max(step, value) AS slowest_step
FROM work JOIN walls USING (run_id)
GROUP BY run_id, phase, work
ORDER BY run_id, seconds DESC;
