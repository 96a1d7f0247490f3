"""Frequent given names and surnames, casefolded: what the rule detector takes for persons. No list is complete."""

GIVEN_NAMES = frozenset(
    """
    aaron abby abdul abigail adam adrian adriana ahmed aisha alan albert alberto alejandro aleksander alex alexander
    alexandra alexis alfred ali alice alicia alina alison allan allison amanda amber amelia amir amy ana anastasia
    andre andrea andreas andrei andrew andy angela angelica angelina angelo anita ann anna anne annette annie anthony
    antoine anton antonio april ariana arianna arthur ashley audrey austin ava barbara beatrice beatriz ben benjamin
    bernard bernd beth bettina betty beverly bianca bill billy birgit bjorn björn bob bobby boris brad bradley brandon
    brenda brent brian brianna bridget brittany bruce bruno bryan caleb cameron camila camille carl carla carlos
    carmen carol carolina caroline carolyn carrie catarina catherine cathy cecilia celia chad charles charlie
    charlotte chelsea cheryl chiara chloe chris christian christina christine christopher cindy claire clara claudia
    clemens clifford colin connie connor corey courtney craig cristina crystal curtis cynthia daisy dale damian dan
    dana daniel daniela daniele danielle danny darlene darren dave david dawn dean deborah debra delia denis denise
    dennis derek diana diane diego dieter dimitri dmitri dolores dominic dominik donald donna doris dorothy douglas
    dustin dylan eddie edgar edith eduardo edward edwin eileen elaine eleanor elena elias elijah elisa elisabeth eliza
    elizabeth ella ellen elsa emil emilia emily emma enrique eric erica erich erik erika erin ernest ernesto esteban
    esther ethan eugene eva evan eve evelyn fabian fatima federico felipe felix fernanda fernando filip fiona florence
    florian frances francesca francesco francis francisco franco frank franz fred freddie frederick friedrich gabriel
    gabriela gabriele gail gary gavin geoffrey george georgia gerald gerard gerhard giacomo gina giorgio giovanni
    giulia gladys glen glenn gloria gonzalo gordon grace graham greg gregory greta guillermo gunnar gustav guy hannah
    hans harald harold harriet harry hassan heather hector heidi heinrich helen helena helga henri henrik henry
    herbert herman holly howard hubert hugh hugo ian ibrahim ida igor ilse ines inga ingrid irene irina iris isaac
    isabel isabella isaiah ivan ivana jack jackie jackson jacob jacqueline jacques jaime jake jakob jakub james jamie
    jan jane janet janice jared jasmin jasmine jason javier jean jeff jeffrey jennifer jenny jens jeremy jerome jerry
    jesse jessica jesus jill jim jimmy joachim joan joana joanna joanne joe joel johan johann johanna john johnny
    jonas jonathan jorge jose josef joseph josephine joshua joyce juan juana juanita judith judy julia julian juliana
    julie julien juliette julio june jurgen justin jürgen kaitlyn karen karin karl karla karolina kate katherine
    kathleen kathryn kathy katie katja kayla keith kelly ken kenneth kevin kim kimberly klaus konrad kristen kristin
    kristina kurt kyle lance larry lars laura lauren laurence laurent lawrence leah lee lena leo leon leonard leonardo
    leroy leslie levi liam lilian lillian lily linda lisa liz lloyd logan lois lola lorenzo lori lorraine louis louise
    luca lucas lucia luciana lucy ludwig luigi luis luisa lukas luke lydia lynn mackenzie madeline madison magda
    magdalena malcolm manfred manuel manuela marc marcel marcia marco marcos marcus margaret margarita maria mariam
    mariana marianne marie marilyn marina mario marion marisa marjorie mark marko markus marlene marta martha martin
    martina marvin mary mateo mathew mathias matilda matt matteo matthew matthias maureen maurice mauricio max maxim
    maximilian maxwell megan melanie melinda melissa michael michaela michal michel michele michelle miguel mikael
    mike mila milan mildred miranda mitchell mohamed mohammad mohammed moises molly monica monika morgan muhammad
    mustafa nadia nadine nancy naomi natalia natalie natasha nathan nathaniel neil nelson niccolo nicholas nick nicola
    nicolas nicole nicolò niels nikita nikolai nils nina noah noel noemi nora norbert norma norman oksana olga oliver
    olivia omar oscar oskar otto owen pablo pamela paola paolo patricia patrick paul paula paulo pavel pedro peggy
    penelope per pernille peter petra phil philip philipp philippe phillip phyllis piotr rachel rafael raimund ralf
    ralph ramon randall randy raphael raul ray raymond rebecca regina reginald renata renate rene rhonda ricardo
    riccardo richard rick ricky rita rob robert roberta roberto robin rodney rodrigo roger roland rolf roman ron
    ronald rosa rosalie rosario rose rosemary ross roy ruben rudolf russell ruth ryan sabine sabrina sally salvatore
    sam samantha samuel sandra sandy santiago sara sarah sasha scott sean sebastian sergei sergio seth shane shannon
    sharon shaun shawn sheila shelby sherry shirley sibylle sidney silvia simon simone sofia sonia sonja sophia sophie
    stacey stacy stanislav stanley stefan stefanie stefano stella stephan stephanie stephen steve steven stuart sue
    susan susanna susanne suzanne sven svetlana sylvia tamara tammy tania tanya tara tatiana taylor ted teresa
    terrence terry theo theodore theresa thomas tiffany tim timothy tina tobias todd tom tomas tommy toni tony tracy
    travis trevor tristan troy tyler udo ulrich ulrike ursula uwe valentina valeria valerie vanessa vera vernon
    veronica victor victoria viktor vincent vincenzo violet virginia vivian vladimir walter wanda warren wayne wendy
    werner wesley wilhelm will william willie wolfgang xavier yolanda yusuf yvette yvonne zachary zoe
    """.split()
)

SURNAMES = frozenset(
    """
    adams alexander allen alvarez andersen anderson andersson armstrong arnold bailey baker barnes becker bell bennett
    berg bernard bianchi black bonnet boyd bradley brooks brown bryant burns butler campbell carlson carroll carter
    castillo castro chavez chen christensen clark coleman collins cook cooper cox crawford cruz cunningham daniels
    davies davis diaz dixon dubois duncan dunn dupont edwards ellis eriksson evans ferguson fernandez ferrari fischer
    fisher fleming flores ford foster fournier fox freeman garcia gardner gibson girard gomez gonzales gonzalez gordon
    graham grant gray green greene griffin gruber gutierrez hall hamilton hansen hanson hansson harper harris harrison
    hart harvey hawkins hayes henderson henry hernandez herrera hicks hill hoffman hoffmann holmes horvath howard
    huang huber hudson hughes hunt hunter ivanov jackson jacobs jacobsen james jenkins jensen jimenez johansen
    johansson johnson johnston jones jordan jovanovic karlsson kelley kelly kennedy khan kim king klein knight koch
    kovacs kowalski kumar lambert larsen larson larsson lawrence lawson lee lefebvre leroy lewis lopez lund martin
    martinez mason mayer mcdonald medina mendoza meyer miller mitchell moore morales moreau moreno morgan morris
    morrison muller murphy murray myers müller nelson newman nguyen nichols nielsen nilsson novak nowak obrien oliver
    olsen olson olsson ortiz owens palmer park parker patel patterson pedersen perez perkins perry persson peters
    petersen peterson petrov petrovic phillips pierce popov porter powell price ramirez ramos rasmussen ray reed reyes
    reynolds rice richards richardson richter rivera roberts robertson robinson rodriguez rogers romano romero rose
    ross rossi ruiz russell russo ryan salazar sanchez sanders santos schmidt schneider schroeder schulz schwartz
    schwarz scott shaw silva simmons simpson singh smirnov smith snyder sokolov sorensen soto spencer stephens stevens
    stewart stone sullivan svensson taylor thomas thompson thomsen toth tran tucker turner vargas vasquez vogel wagner
    walker wallace wang ward warren washington watkins watson weaver webb weber weiss wells west wheeler white
    williams williamson willis wilson wolf wong wood woods wright yang young zhang zimmermann
    """.split()
)

# Also everyday words, places, months or titles: a name only beside another capitalised word.
AMBIGUOUS = frozenset(
    """
    april art austin bell berg bill black bob brent brooks brown butler cook cooper crystal daisy dale dan dawn dean
    dixie dixon eve faith fisher florence ford forest foster fox franco frank freeman gail gene georgia grace grant
    gray green hart hill holly hope hunt hunter iris ivy jack jackson jordan june king knight lane lee lily logan long
    madison marina mark mason max may miller myers newman olive paris park parker pat paul per perry pierce porter
    price ray reed rice rich rick rob robin roman rose ruby russell sandy shaw sky smith sofia stella stone sue summer
    taylor terry victoria violet virginia walker ward warren washington weaver webb wells west white will willow wolf
    wood woods young
    """.split()
)
