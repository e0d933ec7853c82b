-- Groups of a training run step by step: how many have a signal (rewards that differ), are all correct or all wrong, and |advantage|.
-- :phase = "train"
-- plot: x=step y=signal,all_correct,all_wrong,mean_abs_advantage

-- The shares are of all groups. A failed grade counts as reward 0, as in training.
WITH groups AS (
    SELECT
        run_id,
        step,
        count(*) AS samples,
        min(coalesce(reward, 0)) AS least,
        max(coalesce(reward, 0)) AS most,
        count(*) FILTER (reward IS NULL) AS grade_errors,
        sum(abs(advantage)) AS advantage,
        count(advantage) AS advantages
    FROM rollouts
    WHERE phase = $phase
    GROUP BY run_id, step, example_id
)
SELECT
    run_id,
    step,
    count(*) AS groups,
    avg(samples) AS size,
    avg((least < most)::INT) AS signal,
    avg((least = most)::INT) AS zero_variance,
    avg((least = 1 AND most = 1)::INT) AS all_correct,
    avg((least = 0 AND most = 0)::INT) AS all_wrong,
    sum(advantage) / sum(advantages) AS mean_abs_advantage,
    sum(grade_errors)::BIGINT AS grade_errors
FROM groups
GROUP BY run_id, step
ORDER BY run_id, step;
