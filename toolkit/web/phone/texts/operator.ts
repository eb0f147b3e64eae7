/** What the coordinator is told of this device in words, for its operator: always in English. */

import type { PauseReason } from "../agent/messages.js";
import { ENGLISH_FAULTS } from "./english_faults.js";

export const OPERATOR = {
  faults: ENGLISH_FAULTS,
  pauses: {
    owner: "paused by its owner",
    hidden: "page hidden",
    unplugged: "not charging",
    metered: "on metered data",
  } satisfies Record<PauseReason, string>,
};
