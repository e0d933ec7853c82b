-- How far a run was after each number of updates: steps of its algorithm, rollouts and tokens that training had taken, minutes.
-- plot: y=algorithm_steps,rollouts,tokens,minutes

-- Of a batch that several updates share, each takes an equal part, of rollouts and tokens to a whole number. Rollouts and tokens
-- are those sampled for training, those of groups that were dropped included; of an algorithm that does not sample (sft, dpo on
-- pairs) the responses of its updates.
WITH taken AS (
    SELECT
        run_id,
        step,
        max(value) FILTER (name = 'reward/samples') AS sampled,
        max(value) FILTER (name = 'sampling/tokens') AS sampled_tokens,
        max(value) FILTER (name = 'update/rows') AS rows,
        max(value) FILTER (name = 'update/tokens') AS row_tokens,
        bool_or(name LIKE 'update/%' OR name = 'optimizer/grad_norm') AS updated
    FROM metrics
    WHERE phase = 'train'
    GROUP BY run_id, step
), ends AS (
    SELECT run_id, max(step) + 1 AS done, bool_or(sampled IS NOT NULL) AS samples FROM taken WHERE updated GROUP BY run_id
), batches AS (
    SELECT
        run_id,
        step AS start,
        lead(step, 1, done) OVER run AS next,
        row_number() OVER run - 1 AS steps_before,
        if(samples, sampled, rows) AS rollouts,
        if(samples, sampled_tokens, row_tokens) AS tokens,
        coalesce(sum(if(samples, sampled, rows)) OVER earlier, 0) AS rollouts_before,
        coalesce(sum(if(samples, sampled_tokens, row_tokens)) OVER earlier, 0) AS tokens_before
    FROM taken JOIN ends USING (run_id)
    WHERE sampled IS NOT NULL OR NOT samples
    WINDOW run AS (PARTITION BY run_id ORDER BY step),
        earlier AS (PARTITION BY run_id ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
), measured AS (
    SELECT run_id, step, max(wall_seconds) FILTER (name <> 'step/seconds') / 60 AS minutes FROM metrics GROUP BY run_id, step
), parts AS (
    SELECT measured.*, batches.*, least((measured.step - start) / nullif(next - start, 0), 1) AS part
    FROM measured ASOF LEFT JOIN batches ON measured.run_id = batches.run_id AND measured.step >= batches.start
)
SELECT
    run_id,
    step,
    coalesce(steps_before + part, 0) AS algorithm_steps,
    coalesce(round(rollouts_before + part * rollouts), 0)::BIGINT AS rollouts,
    coalesce(round(tokens_before + part * tokens), 0)::BIGINT AS tokens,
    minutes
FROM parts
ORDER BY run_id, step;
