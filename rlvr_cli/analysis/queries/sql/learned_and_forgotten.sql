-- Evaluated questions that a training run learned (solved for good from a step on) or forgot (last solved at a step).
-- :phase = "eval"
-- :examples = 3
-- plot: x=step y=questions panels=change bars=yes

-- A question is solved at a step if at least half of the samples are correct. Questions evaluated at only one step are left
-- out. With one sample per question, chance alone produces some of both: `migration` shows how many change in either direction.
WITH solved AS (
    SELECT run_id, example_id, step, count(*) FILTER (reward > 0.5 AND NOT isnan(reward)) * 2 >= count(*) AS solved
    FROM rollouts
    WHERE phase = $phase
    GROUP BY run_id, example_id, step
), questions AS (
    SELECT
        run_id, example_id,
        arg_max(solved, step) AS solved_last,
        bool_and(solved) AS always,
        bool_or(solved) AS ever,
        max(step) FILTER (solved) AS last_solved,
        max(step) FILTER (NOT solved) AS last_unsolved,
        list(step ORDER BY step) AS steps
    FROM solved
    GROUP BY run_id, example_id
    HAVING count(*) > 1
), changes AS (
    SELECT
        run_id, example_id,
        CASE
            WHEN always THEN 'always solved'
            WHEN NOT ever THEN 'never solved'
            WHEN solved_last THEN 'learned at step'
            ELSE 'forgotten after step'
        END AS change,
        CASE
            WHEN always OR NOT ever THEN NULL
            WHEN solved_last THEN steps[list_position(steps, last_unsolved) + 1]
            ELSE last_solved
        END AS at_step
    FROM questions
)
SELECT
    run_id,
    change,
    at_step AS step,
    count(*) AS questions,
    count(*) / sum(count(*)) OVER (PARTITION BY run_id) AS share,
    list(example_id ORDER BY example_id)[:$examples::BIGINT] AS examples
FROM changes
GROUP BY run_id, change, at_step
ORDER BY
    run_id,
    list_position(['learned at step', 'forgotten after step', 'always solved', 'never solved'], change),
    at_step;
