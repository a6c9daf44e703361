/** Prompts of our own: records in the style of the E2E task (each ends with a line break), and questions. */
export const EXAMPLES = {
  completion: [
    ["Riverside pub", "name[The Blue Heron], eatType[pub], food[Italian], priceRange[moderate], area[riverside], near[Old Mill Bakery]\n"],
    ["French coffee shop", "name[Copper Kettle], eatType[coffee shop], food[French], customer rating[5 out of 5], familyFriendly[yes]\n"],
    ["Cheap Indian", "name[Saffron Lane], eatType[restaurant], food[Indian], priceRange[cheap], area[city centre]\n"],
    ["Not for families", "name[The Lantern], food[Chinese], customer rating[low], area[riverside], familyFriendly[no]\n"],
  ],
  chat: [
    ["Blue sky", "Why is the sky blue? Answer in two sentences."],
    ["Rainy Sunday", "Give me three ideas for a rainy Sunday at home."],
    ["Thank-you note", "Write a short thank-you note to a neighbour who watered my plants."],
  ],
};

export const HINTS = {
  completion: "Sent as it stands, line breaks too. The examples are restaurant records, for a model tuned on them.",
  chat: "Sent as one message of a user, in the model's own chat format.",
};
